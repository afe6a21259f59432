"""What a drafter is, and each of them: one file a method."""
