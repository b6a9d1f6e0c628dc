"""What commands are given: options, files and the requests that they amount to."""
