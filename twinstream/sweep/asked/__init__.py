"""What a sweep of machines or of clusters may ask for, and the cells that it amounts to."""
