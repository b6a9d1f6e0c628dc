"""What the results come to: tables, and a page of the benchmarks."""
