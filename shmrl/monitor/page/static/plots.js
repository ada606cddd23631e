// Plotly with this page's colours and sizes. A chart is drawn anew only when its data or the theme changed.

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

export function layout(extra = {}) {
  const axis = { gridcolor: style("--line"), zeroline: false, linecolor: style("--line"), tickfont: { size: 11 }, automargin: true };
  return {
    margin: { l: 44, r: 10, t: 8, b: 26 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--muted"), family: "system-ui, sans-serif", size: 11 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: style("--card"), bordercolor: style("--line"), font: { color: style("--text"), size: 12 } },
    legend: { orientation: "h", y: 1, yanchor: "bottom", x: 0, font: { size: 11 } },
    uirevision: "kept",
    ...extra,
    xaxis: { ...axis, ...extra.xaxis }, yaxis: { ...axis, ...extra.yaxis },
  };
}

export function draw(where, traces, extra) {
  return window.Plotly.react(where, traces, layout(extra), { displayModeBar: false, responsive: true });
}

export function muted() { return style("--muted"); }
