"""Ways for staged weights to reach the engines."""
