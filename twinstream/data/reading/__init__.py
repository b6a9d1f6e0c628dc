"""Reading people's files: which files there are, their blocks, and the rows in a block."""
