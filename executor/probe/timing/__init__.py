"""How a call is timed, on a GPU under load and on a CPU, and lines through times."""
