"""Pictures as SVG and as text: of partitions, blocks, movements and messages. Pure: plain numbers in, text out."""
