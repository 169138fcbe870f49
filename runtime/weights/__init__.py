"""Where a stage's weights come from, how they become what the plan says, how they are written."""
