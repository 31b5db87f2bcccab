//! Tools of a response: functions, some of them in namespaces, among kinds that only other servers can carry out.

use serde_json::Value;

use crate::app::App;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::known;
use crate::tools::{AskedChoice, Tool, ToolSettings, check_distinct};

/// Namespaces in namespaces are no use to anybody.
const DEEPEST: usize = 4;

/// The names that functions of namespaces go by in the prompt.
#[derive(Debug, Default)]
pub(super) struct Namespaces(Vec<Spaced>);

#[derive(Debug)]
struct Spaced {
    shown: String,
    namespace: String,
    name: String,
}

impl Namespaces {
    /// The namespace and the name in it of a function that the prompt shows as `shown`.
    pub(super) fn split<'a>(&'a self, shown: &'a str) -> (Option<&'a str>, &'a str) {
        match self.0.iter().find(|spaced| spaced.shown == shown) {
            Some(spaced) => (Some(&spaced.namespace), &spaced.name),
            None => (None, shown),
        }
    }

    /// The name that a function goes by in the prompt.
    pub(super) fn join(&self, namespace: Option<&str>, name: &str) -> String {
        let is_it = |spaced: &&Spaced| Some(spaced.namespace.as_str()) == namespace && spaced.name == name;
        match (self.0.iter().find(is_it), namespace) {
            (Some(spaced), _) => spaced.shown.clone(),
            (None, Some(namespace)) => shown(namespace, name),
            (None, None) => name.to_owned(),
        }
    }
}

/// Unlike any name in another namespace.
fn shown(namespace: &str, name: &str) -> String {
    if namespace.ends_with("__") { format!("{namespace}{name}") } else { format!("{namespace}__{name}") }
}

/// `tools`, `tool_choice` and `parallel_tool_calls`.
pub(super) fn take_tools(app: &App, fields: &mut Fields) -> Result<(ToolSettings, Namespaces), ApiError> {
    let mut tools = Vec::new();
    let mut namespaces = Namespaces::default();
    let items = fields.list("tools")?.unwrap_or_default();
    let mut taking = Taking { app, tools: &mut tools, namespaces: &mut namespaces };
    for (index, item) in items.into_iter().enumerate() {
        taking.take(&format!("tools[{index}]"), item, None, 0)?;
    }
    check_distinct("tools", &tools)?;
    let asked = fields.take("tool_choice").map(|value| AskedChoice::parse("tool_choice", value));
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let settings = ToolSettings::new(tools, asked.transpose()?, parallel, "tool_choice")?;
    Ok((settings, namespaces))
}

struct Taking<'a> {
    app: &'a App,
    tools: &'a mut Vec<Tool>,
    namespaces: &'a mut Namespaces,
}

impl Taking<'_> {
    fn take(
        &mut self,
        path: &str,
        item: Value,
        namespace: Option<&str>,
        depth: usize,
    ) -> Result<(), ApiError> {
        let mut fields = Fields::nested(path, item)?;
        let kind = fields.string("type")?;
        match kind.as_deref() {
            Some("function") => self.take_function(path, &mut fields, namespace),
            Some("namespace") if depth < DEEPEST => {
                let name = fields.string("name")?.unwrap_or_default();
                let name = namespace.map_or_else(|| name.clone(), |outer| shown(outer, &name));
                let tools_path = fields.path("tools");
                for (index, tool) in fields.list("tools")?.unwrap_or_default().into_iter().enumerate() {
                    self.take(&format!("{tools_path}[{index}]"), tool, Some(&name), depth + 1)?;
                }
                Ok(())
            }
            Some(other) => {
                known::ignored_tool(self.app, other);
                Ok(())
            }
            None => Err(ApiError::value(fields.path("type"), "a string", &Value::Null)),
        }
    }

    fn take_function(
        &mut self,
        path: &str,
        fields: &mut Fields,
        namespace: Option<&str>,
    ) -> Result<(), ApiError> {
        let mut function = serde_json::Map::new();
        for name in ["name", "description", "parameters", "strict"] {
            function.extend(fields.take(name).map(|value| (name.to_owned(), value)));
        }
        let mut function = Value::Object(function);
        if let (Some(namespace), Some(name)) = (namespace, function["name"].as_str().map(str::to_owned)) {
            let shown = shown(namespace, &name);
            function["name"] = shown.clone().into();
            self.namespaces.0.push(Spaced { shown, namespace: namespace.to_owned(), name });
        }
        self.tools.push(Tool::new(path, function)?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_namespaces_go_there_and_back() {
        let spaced = |namespace: &str, name: &str| Spaced {
            shown: shown(namespace, name),
            namespace: namespace.into(),
            name: name.into(),
        };
        let namespaces = Namespaces(vec![spaced("files", "read"), spaced("mcp__web__", "read")]);
        assert_eq!(namespaces.join(Some("files"), "read"), "files__read");
        assert_eq!(namespaces.join(Some("mcp__web__"), "read"), "mcp__web__read");
        assert_eq!(namespaces.split("mcp__web__read"), (Some("mcp__web__"), "read"));
        assert_eq!(namespaces.split("shell"), (None, "shell"));
        assert_eq!(namespaces.join(None, "shell"), "shell");
        assert_eq!(namespaces.join(Some("gone"), "read"), "gone__read");
    }
}
