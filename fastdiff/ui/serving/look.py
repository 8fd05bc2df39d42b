"""The look of the page: its theme, its style sheet and its one script."""

import gradio as gr

SMALL = 256  # pixels: pictures with a longest side up to this are always crisp, larger ones only when enlarged
# stronger contrast than Gradio's defaults: at least 4.5 to 1
THEME = gr.themes.Default(primary_hue="indigo").set(
    body_text_color_subdued="*neutral_500",
    button_primary_background_fill="*primary_600",
    button_primary_background_fill_hover="*primary_700",
    button_cancel_background_fill="#dc2626",
    button_cancel_background_fill_hover="#b91c1c",
)

CSS = """
.bar { height: 10px; margin-bottom: 6px; border-radius: 5px; background: var(--border-color-primary); overflow: hidden }
.bar div { height: 100%; background: var(--primary-500) }
.problem { color: var(--error-text-color); background: var(--error-background-fill);
           border: 1px solid var(--error-border-color); border-radius: var(--radius-sm); padding: 8px 12px }
.settings { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0 }
.settings dt { color: var(--body-text-color-subdued) }
.settings dd { margin: 0; overflow-wrap: anywhere; white-space: pre-line }
:focus-visible { outline: 2px solid var(--primary-500) !important; outline-offset: 2px !important }
:is([role="tab"], .thumbnail-small, .thumbnail-lg):focus-visible { outline-offset: -2px !important }  /* not cut off */
.dark input[type="range"] { --neutral-200: var(--neutral-600) }  /* the rest of a slider's track */
input[role="combobox"] { margin-right: 20px; text-overflow: ellipsis }  /* keep the text off the arrow */
.row:has(> .form:empty) { display: none }
.block.tokens { margin-top: -1px; padding: 0 16px 6px !important; background: var(--block-background-fill) }
.tokens > div { max-height: 5em; overflow-y: auto }
.tokens div { font-size: var(--text-sm); line-height: 1.4; text-align: right; overflow-wrap: anywhere }
.tokens .cut { color: var(--error-text-color) }
.examples button { overflow: hidden; border: 1px solid var(--border-color-primary); border-radius: var(--radius-md);
                   background: var(--block-background-fill); color: var(--body-text-color); line-height: 1.3 }
.examples button:hover { border-color: var(--primary-500) }
.examples img { width: 100%; image-rendering: pixelated }
#control-preview:not(:has(figure)):not(:has(.problem)) { display: none }
#control-preview figure { margin: 0; text-align: center }
#control-preview img { display: block; width: min(100%, 240px); margin: 0 auto; image-rendering: pixelated }
#control-preview figcaption { font-size: var(--text-sm); color: var(--body-text-color-subdued) }
.paint .layers { position: relative; isolation: isolate; width: min(100%, 420px); margin: 0 auto; line-height: 0 }
.paint .layers img:first-child { width: 100% }
.paint canvas, .paint .old { position: absolute; inset: 0; width: 100%; height: 100%; mix-blend-mode: screen;
                             opacity: 0.9 }
.paint canvas { touch-action: none; cursor: crosshair }
.paint .tools { display: flex; flex-wrap: wrap; align-items: center; gap: 8px; margin-top: 8px }
.paint .tools label { display: flex; flex: 1; align-items: center; gap: 8px }
.paint .tools input { flex: 1; min-width: 60px }
.paint button { padding: 4px 12px; min-height: 32px; border: 1px solid var(--border-color-primary);
                border-radius: var(--radius-sm); background: var(--background-fill-secondary) }
.paint button[aria-pressed="true"] { border-color: var(--primary-500); background: var(--primary-500); color: white }
.gr-group:not(:has(.block)) { display: none }  /* would show as a line */
.enlarged img { width: 100%; height: 100%; object-fit: contain }
.enlarged img[data-small], img[data-small][data-testid="imageslider-image"] { image-rendering: pixelated }
.seed .styler { position: relative }
.seed .styler > .block { position: absolute; right: 20px; bottom: 15px; width: auto !important; height: 32px }
.seed input { padding-right: 88px !important; appearance: textfield }
.seed input::-webkit-inner-spin-button { display: none }
.seed button { width: 32px; height: 32px; padding: 6px; border-radius: var(--radius-sm); float: left }
.seed button:hover { background: var(--background-fill-secondary) }
.seed svg { width: 20px; height: 20px; fill: none; stroke: currentColor; stroke-width: 2; stroke-linecap: round }
/* the field of the steps stands where a slider has its own, which would take no more than the slider */
.steps label.block { display: grid; grid-template-columns: 1fr 80px; row-gap: 2px }
.steps label.block input { grid-area: 1 / 2 / span 2; align-self: start; padding: 4px 8px !important;
                           text-align: center }
.steps .head { display: none }
.steps .form { gap: 0 !important } .steps .block + .block { padding-top: 0 !important }
.side .form { min-width: min(320px, 100%) !important }
.side > .form:has(+ .steps) { min-width: 160px !important; flex: 0 1 160px !important }
.side > .steps { flex: 0 1 128px } .side > .steps + .form { flex: 1 1 700px !important }
.side .steps .block { min-width: 0 !important }
.side .head { gap: 8px; flex-wrap: nowrap } .side .head label { min-width: max-content }
.side .head input { width: 56px; min-width: 0 }
.side .steps .form label.block { grid-template-columns: 1fr 60px }
.side [data-testid="block-info"] { margin-bottom: 4px }
.side :is(.info-text, .min_value, .max_value, .reset-button) { display: none }  /* only in Draw, which has more room */
.side { align-items: start } .side > .block:has(h3) { flex: 0 0 24px; min-width: 24px }

/* A picture in its frame: a large one is scaled down to fit, a small one is enlarged by an integer factor. */
:root { --stage: min(68vh, 600px, 112vw) }
#history { --stage: clamp(280px, 100vh - 370px, 112vw) }  /* above the fold */
.stage .media-button, .stage .thumbnail-lg, .frame {
    container-type: size; display: grid; place-items: center; place-content: center; overflow: hidden }
.stage .preview::before { opacity: 1 !important }
.stage img, .frame img {
    --room: min(100cqw, 100cqh * var(--ratio)); --enlarged: round(down, var(--room), var(--w)) }
.stage img[data-small], .frame img[data-small] {
    width: max(var(--w), var(--enlarged)) !important;
    height: auto !important; border-radius: 0 !important; image-rendering: pixelated }
.stage .media-button img, .frame img:not([data-small]) {
    width: max(min(var(--w), var(--room)), var(--enlarged)) !important; height: auto !important }
.stage .thumbnails img, .stage .thumbnail-lg img:not([data-small]) { width: 100% !important; height: 100% !important }
.stage .thumbnail-small:only-child { opacity: 0 }
.stage .thumbnails { scrollbar-width: thin }
.stage .caption { max-width: 100% }
.stage-column:has(input[value="Pixels"]:checked) .stage .media-button { display: block; overflow: auto }
.stage-column:has(input[value="Pixels"]:checked) .stage .media-button img {
    width: round(down, max(2 * var(--w), 200cqw), var(--w)) !important; max-width: none;
    height: auto !important; border-radius: 0; image-rendering: pixelated }
.stage-column:has(input[value="Grid"]:checked) .stage .preview { display: none }
.stage .thumbnail-lg:has(img[alt^="✓"]) { outline: 3px solid var(--primary-500); outline-offset: -3px }
.stage-column:has(input[value="Grid"]:checked) :is(#previous, #next) { display: none }
.stage .empty svg, .enlarged .empty svg { display: none }
.stage .empty::after, .enlarged .empty::after {
    content: "The picture appears here"; color: var(--body-text-color-subdued) }

/* The buttons and the status line lie above pictures and labels, whose z-indexes are 20 and 40. */
.gradio-container { @media (max-width: 640px) {
    padding-bottom: 72px !important;  /* room for .actions, and what has the focus scrolls out from under them */
    * { scroll-margin-bottom: 80px } &:has(.actions :is(li, .problem)) {
        padding-bottom: 200px !important; * { scroll-margin-bottom: 200px } } } }
.gradio-container { overflow: clip !important }  /* hidden would disable position: sticky */
.actions { position: sticky; bottom: 0; z-index: 41; padding: 8px 0; gap: 4px !important;
           background: var(--body-background-fill) }
.actions .html-container, .seed .html-container { padding: 0 !important }
.actions:not(:has(li)) { margin-top: 40px }  /* room for one run, whose line does not move the button */
.column:has(> .actions) * { scroll-margin-bottom: 80px }  /* a field in focus scrolls out from under them */
.column:has(> .actions li) *,
.column:has(> .actions .problem) * { scroll-margin-bottom: 200px }
.status { font-variant-numeric: tabular-nums }
.block.status { min-height: 56px }  /* Gradio's own min_height pauses while an event waits for its answer */
.status:has(.bar, .problem) { position: sticky; top: 0; z-index: 41; background: var(--body-background-fill) }
.actions > .block:not(:has(li)):not(:has(.problem)) { display: none }
.runs { list-style: none; margin: 0; padding: 0; max-height: 108px; overflow-y: auto; font-size: var(--text-sm) }
.runs li { display: flex; align-items: center; gap: 8px; height: 36px; padding-left: 8px;
    border-radius: var(--radius-sm);
    background: linear-gradient(var(--primary-500) 0 0) left bottom / var(--done) 2px no-repeat }
.runs .title { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap }
.runs .state { color: var(--body-text-color-subdued); font-variant-numeric: tabular-nums; white-space: nowrap }
.runs button { padding: 4px 12px; min-height: 28px; border-radius: var(--radius-sm); color: var(--error-text-color);
    border: 1px solid var(--error-border-color); background: var(--error-background-fill) }
[data-testid="status-tracker"].hide { display: none !important }  /* its seconds would be read aloud */
.status [data-testid="status-tracker"] > :is(:has(svg), .error) { display: none }
.status .progress-text { inset: 10px 0 auto auto !important; transform: none; font-family: inherit }
@media (min-width: 700px) { .stage-side { position: sticky; top: 8px; align-self: flex-start } }
@media (max-width: 640px) {
    .actions { position: fixed; left: 0; right: 0; margin: 0 !important; padding: 8px 16px;
               border-top: 1px solid var(--border-color-primary) }
    .enlarged, .live { height: 170px !important }
    #status { min-height: 84px !important }
    #history-page { flex-grow: 1 !important }
    #history-status, #history-view, #selection .block:first-child { flex: 1 0 100% !important }
}

/* The live preview covers the stage above the strip of pictures. It hides while these have the pointer or focus. */
.stage-column { position: relative }
#preview, .live { position: absolute; z-index: 5; inset: 1px 1px auto; width: auto !important;
           height: calc(var(--stage) - 58px);
           padding: 0 !important; background: var(--block-background-fill); pointer-events: none }
.live { height: 320px }
#preview:not(:has(.previews)), .live:not(:has(.previews)) { display: none !important }
.stage-column:has(.thumbnails:hover, .thumbnails :focus-visible, .grid-container:hover) #preview { opacity: 0 }
/* The examples fill the stage until it has a picture. */
#examples { position: absolute; z-index: 4; inset: 1px 1px auto; width: auto !important; overflow-y: auto;
            height: calc(var(--stage) - 2px); padding: 16px !important; border-radius: var(--block-radius);
            background: var(--block-background-fill); font-size: var(--text-sm); text-align: center }
.examples { display: grid; grid-template-columns: repeat(3, minmax(0, 180px)); justify-content: center; gap: 8px;
            margin-top: 8px }
.stage-column:not(:has(.stage .empty)) #examples, .stage-column:has(#preview .previews) #examples {
    display: none !important }
.previews { position: absolute; inset: 8px; display: grid; gap: 8px; grid-auto-flow: row; grid-auto-rows: 1fr;
            grid-template-columns: repeat(auto-fit, minmax(min(130px, 45%), 1fr)) }
@media (max-width: 640px) { .grid-container { --grid-cols: 2 !important } }
"""

# keydown: Ctrl+Enter starts a run. On Tab, Gradio would open a dropdown and leave it open over the form, and the focus
#   would go into its long list, which then closes. Tab passes pictures that lie behind the enlarged one. Escape and the
#   arrow keys go to the stage, unless a field or the tab list needs them.
# keypress: Shift+Enter begins a line in a prompt, like Enter; Gradio would submit the prompt.
# click: a double click on a button that starts a run counts as one click.
# dragover, drop: a file may be dropped anywhere.
# focusin: Gradio would move the focus from the field in which the user types to a new picture. A browser scrolls a text
#   box only until its caret is in the window, which may be under the buttons.
# click on a section's title: the section is laid out bit by bit when it opens; as much as possible of it is shown.
# load: the style sheet scales a picture by its natural size, which is known once it is loaded. Gradio gives the
#   pictures of Compare no text for a screen reader; their label is one.
# MutationObserver: Gradio has no roles for groups, and none for an empty stage. It builds a tab when it is opened.
JS = f"""
() => {{
    const passCovered = () => {{
        for (const list of document.querySelectorAll("[role=listbox]")) list.tabIndex = -1;
        for (const stage of document.querySelectorAll(".stage")) {{
            const isCovered = Boolean(stage.querySelector(".preview")?.checkVisibility());
            for (const tile of stage.querySelectorAll(".thumbnail-lg")) tile.tabIndex = isCovered ? -1 : 0;
            const strip = [...stage.querySelectorAll(".thumbnail-small")];
            for (const each of strip) each.tabIndex = strip.length > 1 ? 0 : -1;  // a single one is transparent
        }}
    }};
    addEventListener("keydown", (event) => {{
        if (event.key === "Tab") passCovered();
        const draws = event.key === "Enter" && (event.ctrlKey || event.metaKey);
        if (draws || (event.key === "Tab" && event.target.role === "combobox")) event.stopPropagation();
        const button = [...document.querySelectorAll("button.primary")].find((each) => each.checkVisibility());
        if (draws && !event.repeat) button?.click();
        if (!["Escape", "ArrowLeft", "ArrowRight"].includes(event.code)) return;
        if (event.target.closest("input, textarea, [role=tablist]")) return;
        const stage = [...document.querySelectorAll(".stage .preview")].find((each) => each.checkVisibility());
        const step = {{ArrowLeft: "#previous", ArrowRight: "#next"}}[event.code];
        if (step && stage?.closest("#history")) {{  // its pictures go on across pages
            event.stopPropagation();
            return document.querySelector(step).click();
        }}
        if (event.target.closest(".preview")) return;
        stage?.dispatchEvent(new KeyboardEvent("keydown", {{code: event.code, bubbles: true}}));
    }}, true);
    addEventListener("keypress", (event) => {{
        if (event.key === "Enter" && event.shiftKey && event.target.localName === "textarea") event.stopPropagation();
    }}, true);
    addEventListener("click", (event) => {{
        const draws = event.target.closest("button.primary, .examples button");
        if (event.detail > 1 && draws) event.stopImmediatePropagation();
        const section = event.target.closest("button.label-wrap")?.closest(".block");
        if (!section) return;
        const grown = new ResizeObserver(() => section.scrollIntoView({{block: "nearest", behavior: "smooth"}}));
        grown.observe(section);
        setTimeout(() => grown.disconnect(), 1000);
    }}, true);
    for (const name of ["dragover", "drop"]) addEventListener(name, (event) => {{
        const takesIt = event.target.closest("#upload, :is(#start, #control, #ip-adapter) button");
        if (!event.dataTransfer.types.includes("Files") || takesIt) return;
        event.preventDefault();  // otherwise the browser opens the file instead of the page
        const isOwn = event.target.closest("#start, #control, #ip-adapter");  // it has a picture, and takes no other
        const input = name === "drop" && !isOwn && document.querySelector("#upload input[type=file]");
        if (!input) return;
        const first = new DataTransfer();
        first.items.add(event.dataTransfer.files[0]);
        input.files = first.files;
        input.dispatchEvent(new Event("change"));
    }});
    addEventListener("focusin", ({{target, relatedTarget: before}}) => {{
        const isOwn = target.matches(".thumbnail-small:not(:active)") && before?.matches("input, textarea");
        if (isOwn) before.focus({{preventScroll: true}});
        else if (target.localName === "textarea") target.scrollIntoView({{block: "nearest"}});
    }}, true);
    document.addEventListener("load", ({{target: image}}) => {{
        if (image.localName !== "img") return;
        image.alt ||= image.closest(".enlarged")?.querySelector("[data-testid=block-label]")?.textContent.trim() ?? "";
        const [width, height] = [image.naturalWidth, image.naturalHeight];
        image.style.setProperty("--w", width + "px");
        image.style.setProperty("--ratio", width / height);
        const {{clientWidth, clientHeight}} = image.parentElement;
        const fitsTwice = 2 * width <= clientWidth && 2 * height <= clientHeight;
        image.toggleAttribute("data-small", fitsTwice || Math.max(width, height) <= {SMALL});
    }}, true);
    const name = (selector, role, label) => {{
        for (const each of document.querySelectorAll(`${{selector}}:not([role])`)) {{
            each.role = role;
            each.ariaLabel = label(each);
        }}
    }};
    new MutationObserver(() => {{
        name(".empty[aria-label]", "img", () => "No picture yet");
        name(".row.labels", "group", () => "Label");
        name(".gr-group.prompts", "group", () => "Prompts");
        name(".row.size", "group", () => "Picture size");
        name("#axes", "group", () => "X/Y sheet");
        name("#start", "group", () => "Start picture");
        name("#control", "group", () => "ControlNet");
        name("#ip-adapter", "group", () => "IP-Adapter");
        name(".row.thresholds", "group", () => "Thresholds of edges");
        name(".row.controlled", "group", () => "Controlled part of the run");
        name(".paint .tools", "group", () => "Tools of the mask");
        name(".row.interval", "group", () => "Guided part of the run");
        name(".row.syntax", "group", () => "Reading of the prompt");
        name(".row.upscale", "group", () => "Enlarging");
        name(".gr-group.seed", "group", () => "Random start");
        name(".gr-group.steps", "group", () => "Number of steps");
        name(".side:has(h3)", "group", (side) => "Settings of " + side.querySelector("h3").textContent);
    }}).observe(document.body, {{childList: true, subtree: true}});
}}
"""
