"""What training runs leave behind: so far their log."""
