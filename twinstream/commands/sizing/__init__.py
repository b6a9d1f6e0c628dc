"""Commands that say what to train on which GPUs: fleets of jobs, and the best size."""
