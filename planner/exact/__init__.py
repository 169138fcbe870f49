"""The exact planner: order-free label setting with Lagrangian bounds."""
