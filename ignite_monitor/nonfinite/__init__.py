"""What the first number that is not finite has come from."""
