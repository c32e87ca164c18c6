"""When items stop, and what that costs: rules, one loop, costs."""
