"""LoRA: its options, where its matrices lie, and what PEFT calls them."""
