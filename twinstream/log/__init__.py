"""What a training run writes of its steps, and under which names its folder has them."""
