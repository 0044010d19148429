"""What a round drafts, and how much: drafters, the draft head, the depth."""
