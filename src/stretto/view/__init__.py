"""What people look at: tables and plots."""
