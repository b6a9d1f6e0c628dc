"""Analysis of a schedule's timeline: step time, idle time, memory, bytes moved, critical path."""
