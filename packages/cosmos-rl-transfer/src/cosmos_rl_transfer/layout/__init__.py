"""Who holds which part of which tensor, in checkpoint coordinates."""
