"""How good plans are: beside the bound, other planners, and what the seed system measured."""
