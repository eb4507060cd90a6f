"""Planning with integers alone: who owns which box, who needs which box, who forms a team."""
