"""The price of a step of a layered model on a cluster: strategies by class of layer, memory, search."""
