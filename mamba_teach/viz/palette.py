"""Colours that everybody can tell apart (Okabe and Ito, 2008). Never the only carrier of a meaning:
every role also has a letter or a hatch."""

from __future__ import annotations

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#BBBBBB"

CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW)
