"""All work for a lent GPU in one command, resumable: the campaign."""
