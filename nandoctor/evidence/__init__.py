"""The frozen plain records that all other packages exchange; nothing here imports torch."""
