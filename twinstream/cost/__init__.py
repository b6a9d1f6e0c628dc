"""What a training run costs by arithmetic alone: FLOPs, traffic, days, GPU-hours, money."""
