"""One rank of a cluster's schedule in each process, and what passes between them."""
