"""A plan as one page of HTML, for people who would rather look: no network, no library, light and dark.

In: plans with their profiles. Out: a document (page.py): the headline and what takes the time (facts.py, headline.py, seconds.py), memory over the step
(memory_chart.py), calls on their resources (timeline_chart.py), where parameters lie, what each layer splits and keeps, what is exposed (parameters.py, layers.py,
exposed.py), why not otherwise (why.py). Pictures are SVG made here. **Add a section in page.py, its picture or table in a file of its own.**
"""
