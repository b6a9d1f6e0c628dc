"""The seed system's own policy, `ml_dataflow`: how it cuts, sizes and schedules a step."""
