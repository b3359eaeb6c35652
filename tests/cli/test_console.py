"""Tables on the console say what their cells say."""

from l2r.cli.console import print_table
from l2r.report.tables import Table


def test_brackets_and_colons_in_a_table_are_text(capsys):
    rows = (("[bold]data[/bold]", "pip install 'l2r-moe[data]'"), ("gpu", ":warning:"))
    print_table(Table("sizes [N, H]", ("extra", "detail [x]"), rows, caption="of [all]"))
    shown = capsys.readouterr().out
    for words in (*rows[0], ":warning:", "sizes [N, H]", "detail [x]", "of [all]"):
        assert words in shown, shown
