"""How rewards become a loss: advantages (numpy-free Python), losses (torch), and the algorithm that joins them."""
