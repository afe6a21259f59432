"""How a drafter is taught."""
