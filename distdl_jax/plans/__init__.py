"""Planning with integers only: who owns and needs which box, and who forms a team."""
