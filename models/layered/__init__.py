"""Models as chains of layers of a few kinds: recommendation models, encoders and the like."""
