"""What a run must compute and move, whatever the machine: parameters, FLOPs, bytes by mesh axis."""
