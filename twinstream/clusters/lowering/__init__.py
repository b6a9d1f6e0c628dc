"""From a layout to one schedule for each stage: what a rank computes, says and keeps."""
