"""Pages made from files: run folders turned into the page of all runs, benchmark JSON into one self-contained file.

export, server                   the page of runs as a folder of files, and live
site, watch                      what both show; all runs at one moment
index_page, run_page, run_words  HTML of all runs and of one
run_charts, curves, compare      figures of a run, as SVG and for the browser; a run beside the rest of its test
run_data, history, columns, health
                                 a run read on as it grows: attempts laid over each other, numbers by column
amounts                          numbers of a run as a reader sees them
static/                          scripts and styles, uPlot among them (vendored.json has its checksums)

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
