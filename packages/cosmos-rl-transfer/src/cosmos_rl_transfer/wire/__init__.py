"""What two processes say to each other, and how."""
