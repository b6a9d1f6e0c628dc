"""The best size, tokens and layout for GPUs and days, FLOPs or money, by published scaling laws."""
