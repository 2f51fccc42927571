"""Messages and the authenticated link between the two sides."""
