"""Pictures of plans and runs: SVG cards, charts, one self-contained HTML file, and their text form.

No torch, no solver. Every number that is shown is one of plan.json, report.json, or computed from
one plan's fields by the functions here.
"""
