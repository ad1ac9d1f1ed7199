"""The plot of a report; what draws it imports matplotlib, and is imported only where something is drawn."""
