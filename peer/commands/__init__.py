"""Every other command."""
