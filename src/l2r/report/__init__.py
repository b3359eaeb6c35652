"""Figures, tables and one self-contained HTML page; reads run folders, never imports torch."""
