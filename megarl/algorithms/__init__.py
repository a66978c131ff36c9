"""How rewards become a loss: advantages (plain Python), losses (torch), and the algorithm that joins them."""
