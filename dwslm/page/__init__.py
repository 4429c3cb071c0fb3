"""Pages made from files: benchmark JSON turned into Markdown and one self-contained HTML file.

bench_file                       reads and joins the JSON of `dwslm bench`
bench_setup, _arms, _layers, _dense, _proof, _stability
                                 the tables and figures, each with the verdict that its numbers give
claims, claim_rules(_dense), bench_claims
                                 what an earlier day-0 page found, and the rules that answer it for this device
bench_page                       puts the page together and writes it
bench_compare                    two benchmark runs, row by row
rank, words                      who is faster beyond the spreads; numbers as a reader sees them
document, html, markdown, svg    the page as data, and its two forms
"""
