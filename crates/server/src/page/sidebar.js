// The list of chats: open, rename, delete, export, import.
import { Problem, at, button, make } from "./common.js";
import { exportText, importChats, titleOf } from "./store.js";

/** `open(chat)`, `removed(id)`, `isRunning(chat)` and `tell(problem)` are the page's. */
export class Sidebar {
  constructor(store, page) {
    Object.assign(this, { store, page });
    at("sidebar-toggle").addEventListener("click", () => this.show(!document.body.classList.contains("with-sidebar")));
    at("export").addEventListener("click", () => download("qwill-chats", exportText(store.all())));
    at("import").addEventListener("click", () => at("import-file").click());
    at("import-file").addEventListener("change", () => this.import());
  }
  /** On narrow screens the list lies over the talk. */
  show(visible) {
    document.body.classList.toggle("with-sidebar", visible);
    at("sidebar-toggle").setAttribute("aria-expanded", String(visible));
    if (visible) at("new").focus();
  }
  draw(current) {
    this.current = current;
    if (at("chats").querySelector("input")) return;   // somebody is typing a name
    at("chats").replaceChildren(...this.store.all().map((chat) => this.entry(chat)));
  }
  entry(chat) {
    const isCurrent = chat.id === this.current?.id;
    const open = button(titleOf(chat), () => { this.show(false); this.page.open(chat); }, { className: "plain open-chat", title: titleOf(chat) });
    if (isCurrent) open.setAttribute("aria-current", "true");
    if (this.page.isRunning(chat)) open.prepend(make("span", { className: "dot", title: "answering" }));
    const item = make("li", { className: isCurrent ? "current" : "" }, open);
    const more = button("⋯", () => this.menu(item, chat, more), { className: "plain more", ariaLabel: "Rename, export or delete: " + titleOf(chat) });
    more.setAttribute("aria-expanded", "false");
    item.append(more);
    return item;
  }
  menu(item, chat, more) {
    const old = item.querySelector(".menu");
    for (const other of document.querySelectorAll("#chats .menu")) other.remove();
    more.setAttribute("aria-expanded", String(!old));
    if (old) return;
    // Deleting takes two presses, and no dialog that stops everything else.
    const remove = button("Delete", () => {
      if (remove.textContent === "Delete") { remove.textContent = "Really delete"; return; }
      this.store.remove(chat.id);
      this.page.removed(chat.id);
    }, { className: "small bad" });
    const menu = make("div", { className: "menu" },
      button("Rename", () => this.rename(item, chat), { className: "small" }),
      button("Export", () => download(titleOf(chat), exportText([chat])), { className: "small" }), remove);
    menu.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); this.menu(item, chat, more); more.focus(); }
    });
    item.append(menu);
    menu.firstChild.focus();
  }
  rename(item, chat) {
    const field = make("input", { value: titleOf(chat), ariaLabel: "The chat's name", maxLength: 200 });
    let over = false;
    const end = (keep) => {
      if (over) return;
      over = true;
      field.remove();
      if (keep) { chat.title = field.value.trim(); this.page.save(chat); }
      this.page.drawAll();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.focus();
    field.select();
  }
  async import() {
    const [file] = at("import-file").files;
    at("import-file").value = "";
    if (!file) return;
    try {
      const chats = importChats(await file.text());
      for (const chat of chats) this.store.save(chat);
      if (!chats.length) throw new Problem("This file holds no chat.");
      this.page.open(chats[0]);
    } catch (problem) {
      this.page.tell(problem);
    }
    this.draw(this.current);
  }
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = make("a", { href: url, download: name.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) + ".json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
