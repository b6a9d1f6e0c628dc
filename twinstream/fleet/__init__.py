"""Many jobs on the nodes of one cluster: which runs where, with which layout, and when."""
