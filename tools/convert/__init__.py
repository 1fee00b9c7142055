"""Converting weights between the published layouts: plan.py decides, content.py reads, writing.py writes."""
