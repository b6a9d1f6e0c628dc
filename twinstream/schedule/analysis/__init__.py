"""What a schedule's timeline shows: step time, idle time, memory, bytes moved, critical path."""
