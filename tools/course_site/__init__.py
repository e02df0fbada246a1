"""The course as web pages: what `tools/build_site.py` puts together.

Pages are made from files that exist for other reasons (executed notebooks, Markdown pages, docstrings,
an event log), and nothing is executed but the run that the block board shows. Nothing is fetched either,
neither while building nor while reading: formulas become MathML, styles and search lie beside the pages.
"""
