"""What a run does when something broke: checkpoints to go on from, and errors that say what to do."""
