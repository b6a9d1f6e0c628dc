"""Other people's modules: built without weights, traced into a document, run block by block."""
